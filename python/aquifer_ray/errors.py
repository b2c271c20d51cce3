"""What goes wrong, as types. All of them survive pickling, since Ray carries them between processes."""


class NotAssigned(ValueError):
    """Ray has not assigned these bytes to the task or actor: declare them, as aquifer_ray.needs() does."""


class NoMemory(ValueError):
    """No memory of the node could ever hold the request, or the node declares more bytes to Ray than it has."""


class LeaseRefused(TimeoutError):
    """The bytes did not become free in time. The text says what holds them."""
