"""What makes these tests quick, as it does those of whole runs."""

from tests.training.conftest import nothing_waits_for_the_disk, what_stays_is_not_searched

__all__ = ["nothing_waits_for_the_disk", "what_stays_is_not_searched"]
