"""Published ways to split a model inside an ordinary loop, one file each."""
