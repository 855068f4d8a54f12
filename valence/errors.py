"""What a command tells a person in one line, without a traceback."""


class CommandError(Exception):
    """The command could not do what was asked; the text says why and, where possible, what to do."""
