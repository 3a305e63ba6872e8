"""What the benchmark of strategies tells: tables, findings, the score of the advice, pictures."""
