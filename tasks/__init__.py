"""One file for each arrow of the data flow."""
