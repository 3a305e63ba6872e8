"""A store in portions, on several hosts: where it is cut, and what is done to all of them."""
