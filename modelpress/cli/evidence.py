"""`report`, `verify`, `key` and `inspect`: what a verdict rests on, and whether to believe it."""

from __future__ import annotations

import json
import tempfile
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from modelpress.cli.commands import CommonOptions, ServerOptions, open_client
from modelpress.cli.exits import FOR_VERDICT, Exit
from modelpress.cli.jobs import NameOptions
from modelpress.cli.language_view import language_table
from modelpress.cli.output import Output, note, printable
from modelpress.cli.tables import facts_text, report_text, verdict_line
from modelpress.errors import DataLoss, InvalidRequest

DEVELOPMENT_KEY = (
    "warning: this is a development key, which the server made for itself at its first start. "
    "It proves nothing about who signed: verify accepts it only with --allow-development-key."
)
FIRST_CONTACT = (
    "note: a key that comes from the server itself proves only that later outputs are from the same server. "
    "Compare it with its operator once, and keep the file."
)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(NameOptions):
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write report.html to this file.")] = None
    open: Annotated[bool, typer.Option("--open", help="Open report.html in the browser.")] = False


@dataclass(frozen=True, kw_only=True)
class KeyOptions(ServerOptions):
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Write the public key (PEM) to this file.")]


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(CommonOptions):
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A downloaded output.")]
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="The public key (PEM) that must have signed it.")]
    allow_development_key: Annotated[
        bool, typer.Option("--allow-development-key", help="Accept a key that a server made for itself.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class InspectOptions(CommonOptions):
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model, adapter, dataset or output.")]


def report(options: ReportOptions, output: Output) -> Exit:
    """Show the verdict, the gates and a language model's figures; with --json, print report.json. Exits 0 whatever the
    verdict is.
    """
    with open_client(options) as client:
        summary = client.report(options.name)
        page = client.report_html(options.name) if options.html or options.open else b""
        document = _parse_report(client.report_json(options.name))
    if options.html:
        _write(options.html, page)
        note(output.notes, f"report.html is in {options.html}")
    if options.open:
        _open(options.html, page)
    figures = language_table(document)
    output.result(document, Group(report_text(summary), *([figures] if figures else [])))
    return Exit.OK


def verify(options: VerifyOptions, output: Output) -> Exit:
    """Check a downloaded output offline; exits 0 only where every claim holds and the verdict is APPROVED.

    What APPROVED means, and what it does not: docs/approval.md.
    """
    from modelpress.verification import verify_folder

    found = verify_folder(
        options.folder,
        public_key_pem=_read(options.key),
        allow_development_key=options.allow_development_key,
    )
    claims = [printable(f"ok: {claim}") for claim in found.checked]
    facts = {"conversion": found.conversion, "model": found.model_digest, "key": found.key_id, "signed": found.signed}
    document = {**facts, "verdict": found.verdict, "development_key": found.development_key, "checked": found.checked}
    if found.development_key:
        note(output.notes, DEVELOPMENT_KEY)
    output.result(document, Group(*claims, facts_text(facts), verdict_line(found.verdict)))
    return FOR_VERDICT[found.verdict]


def key(options: KeyOptions, output: Output) -> Exit:
    """Fetch the public key that the server's signatures verify with."""
    with open_client(options) as client:
        capabilities = client.capabilities()
    _write(options.output, capabilities.public_key_pem.encode())
    note(output.notes, DEVELOPMENT_KEY if capabilities.development_key else FIRST_CONTACT)
    document = {"file": options.output, "development_key": capabilities.development_key}
    output.result(document, printable(f"the public key is in {options.output}"))
    return Exit.OK


def inspect(options: InspectOptions, output: Output) -> Exit:
    """Say what a folder is, offline: a model, an adapter, a dataset, or the output of a conversion."""
    from modelpress.inspection import inspect_folder

    found = inspect_folder(options.folder)
    facts = {"kind": found.kind, "name": found.name, "files": found.file_count, "bytes": f"{found.size_bytes:,}"}
    details = {name.replace("_", " "): value for name, value in found.facts.items()}
    warnings = [printable(f"warning: {warning}") for warning in found.warnings]
    output.result(found, Group(facts_text({**facts, **details}), *warnings))
    return Exit.OK


def _parse_report(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise DataLoss("the report that the server sent is no JSON object")
    return document


def _open(file: Path | None, page: bytes) -> None:
    """Show the page; without a file of the user's it stays in the folder for temporary files."""
    if file is None:
        with tempfile.NamedTemporaryFile(prefix="modelpress-report-", suffix=".html", delete=False) as target:
            target.write(page)
        file = Path(target.name)
    if not webbrowser.open(file.absolute().as_uri()):
        raise InvalidRequest(f"no browser could be started: open {str(file)!r} yourself", field="open")


def _write(file: Path, data: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    except OSError as error:
        raise InvalidRequest(f"cannot write {str(file)!r}: {error.strerror}") from None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise InvalidRequest(f"cannot read the key file {str(file)!r}", field="key") from None
