"""A model as a folder of files in Hugging Face format."""

from pathlib import Path
from typing import Any

from dora_rl.wire.files import readable_like_others


def save_model(model: Any, folder: Path) -> None:
    """Write weights and configuration in Hugging Face format, readable for others as any file is here."""
    model.save_pretrained(folder, max_shard_size="1TB")
    readable_like_others(folder.glob("*.safetensors"))
