"""The command line. Every command is a module, imported only when it is the one that was asked for."""
