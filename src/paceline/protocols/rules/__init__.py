"""Rules that go with several protocols: balance, compression, hosts, stragglers."""
