"""What goes wrong, as types."""

from __future__ import annotations


class AquiferError(RuntimeError):
    """A call of the library answered with a status that is not AQ_OK.

    `status` is its number, `name` its name in aquifer.h, such as "AQ_ERROR_OUT_OF_MEMORY". Memory that PyTorch asks for and
    does not get is `torch.OutOfMemoryError` instead, as with its own allocator.
    """

    def __init__(self, status: int, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.status, self.name, self.text = status, name, text

    def __reduce__(self) -> tuple[type[AquiferError], tuple[int, str, str]]:
        return type(self), (self.status, self.name, self.text)


class LibraryNotFound(OSError):
    """libaquifer_ffi.so is not where it was looked for; the message lists the places."""


class LibraryVersion(ImportError):
    """The library that was found has another version of its interface than this package."""


class CompanionError(RuntimeError):
    """The C++ companion could not be built or loaded. `command` is what was run, `output` what it said."""

    def __init__(self, text: str, command: str = "", output: str = "") -> None:
        super().__init__("\n".join(part for part in (text, command, output) if part))
        self.command, self.output = command, output


class Uncommitted(AquiferError):
    """A part of elastic memory has no pages. The text names its first bytes."""


class Asleep(RuntimeError):
    """Memory that is paused cannot be used: resume it first."""


class AlreadyInitialised(RuntimeError):
    """PyTorch has an allocator in use already, or this package has been installed: it cannot be changed any more."""
