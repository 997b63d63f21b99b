"""The command line: parsing, default callbacks, and the commands."""
