"""The page of settings is the one that the code makes, and leaves none out."""

from pathlib import Path

from dora_rl.cli.reference import configuration
from dora_rl.config import Config

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"


def test_the_page_of_settings_is_what_the_code_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == configuration(), "run make docs"


def test_every_setting_has_a_meaning() -> None:
    for section in Config.model_fields.values():
        model = next(part for part in getattr(section.annotation, "__args__", (section.annotation,)) if part)
        for name, field in getattr(model, "model_fields", {}).items():
            assert field.description, f"{name} needs a docstring"
