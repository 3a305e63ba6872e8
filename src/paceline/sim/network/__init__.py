"""Links that transfers share, and what travels over them."""
