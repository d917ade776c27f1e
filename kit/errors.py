"""The one exception a user is meant to read."""


class KitError(Exception):
    """Something a user can put right. The message says what is wrong, where, and what would be right.

    The command line prints the message without a traceback and exits with status 2.
    """
