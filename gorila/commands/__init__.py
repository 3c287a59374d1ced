"""The command line's commands, a file a group. gorila/cli.py puts them together; what they do is done elsewhere."""
