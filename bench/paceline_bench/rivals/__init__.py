"""What a user would run instead of Paceline, measured on the same hosts."""
