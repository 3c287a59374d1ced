"""`gorila export minari|onnx`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gorila.commands.options import Servers, Sets, cluster_asked

export_app = typer.Typer(help="A recording or a policy in the formats of other tools.", no_args_is_help=True)


@export_app.command("minari")
def minari(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of Minari datasets; the dataset is DIR/ID.")],
    source: Annotated[str, typer.Option("--from", help="kafka:RUN[@START..END] or parquet:DIR.")],
    dataset_id: Annotated[
        str, typer.Option("--id", help="Name of the dataset, such as cartpole-v0. Default: RUN-v0.")
    ] = "",
    bootstrap_servers: Servers = "",
    sets: Sets = None,
) -> None:
    """Write a recording's whole episodes as a Minari dataset.

    Example: gorila export minari datasets --from parquet:runs/demo/archive
    """
    from gorila.minari_export import export_minari
    from gorila.recording import parse_source

    recording = parse_source(source).open(lambda: cluster_asked(bootstrap_servers, sets, "gorila-export"))
    try:
        made = export_minari(recording, folder, dataset_id)
    finally:
        recording.close()
    typer.echo(
        f"{made.folder}: {made.episodes:,} episodes, {made.steps:,} steps; {made.dropped:,} episodes that are not whole were left out\n"
        f"load it: MINARI_DATASETS_PATH={folder} python -c \"import minari; print(minari.load_dataset('{made.dataset_id}').spec)\""
    )


@export_app.command("onnx")
def onnx(
    weights: Annotated[Path, typer.Argument(help="weights.safetensors of a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.onnx", help="The graph to write.")],
) -> None:
    """Write a policy as an ONNX graph: raw states in, Q values out.

    Example: gorila export onnx runs/RUN/weights.safetensors policy.onnx
    """
    from gorila.onnx_export import export_onnx, refuse_suffix

    refuse_suffix(out)
    made = export_onnx(weights, out)
    typer.echo(
        f"{made.path}: version {made.version}, {made.bytes:,} bytes, states {made.inputs} to q; "
        f"Q values by onnx's reference differ from torch's by {made.difference:.1g} at most"
    )
