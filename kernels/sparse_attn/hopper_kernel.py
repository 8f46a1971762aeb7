"""Place of the Hopper kernel: absent yet, so every call is portable."""


def why_not(device):
    """Why the Hopper kernel cannot run on a device."""
    return "not built"


def launch(*arguments):
    """Refuse."""
    raise NotImplementedError
