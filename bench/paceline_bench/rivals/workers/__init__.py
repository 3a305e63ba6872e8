"""One module per rival: what its processes run, with the interpreter in which it is installed."""
