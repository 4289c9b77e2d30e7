"""Small complete programs on meshpar, and the data they train on."""
