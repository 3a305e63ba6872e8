"""Rules that several protocols share: balance, compression, hosts, stragglers."""
