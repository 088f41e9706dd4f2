"""Every performance claim of the project, as a command that measures it against a baseline of the same run."""
