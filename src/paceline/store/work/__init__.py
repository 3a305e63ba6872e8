"""The work of a run: which samples are still to be done, and who gets them."""
