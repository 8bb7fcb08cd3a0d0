"""The page: one template, filled in. Jinja escapes all that comes from the run."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dspark_lightning import __version__
from dspark_lightning.report.data import Run
from dspark_lightning.report.headline import facts, headline
from dspark_lightning.report.sections import sections


def render(run: Run) -> str:
    """The whole page as HTML; it loads nothing from elsewhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html.jinja").render(
        title="/".join(run.folder.resolve().parts[-2:]),
        facts=facts(run),
        headline=headline(run),
        sections=sections(run),
        version=__version__,
    )
