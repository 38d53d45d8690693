"""The command line. Imports no torch until a command needs it."""
