"""slivertune inside other libraries' loops: the Trainer of transformers and its subclasses."""

from slivertune.interop.trainer import Attachment, attach

__all__ = ["Attachment", "attach"]
