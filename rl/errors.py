"""What a user may meet while a run goes on."""


class RunError(Exception):
    """A run cannot start or go on, for a reason that is no fault of the code; its text is one sentence for the user."""
