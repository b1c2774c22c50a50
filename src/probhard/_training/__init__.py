"""Parts of ``probhard.training``: Lightning module, data, checkpoints and log levels. They need Lightning."""

from probhard.errors import optional

optional("lightning.pytorch", "train", "Training")
