"""Time of capturing the features of a target, against its whole forward pass with all hidden states and logits.

python -m benchmarks.target --target DIR
"""

import argparse
from statistics import median

import torch

from benchmarks import report
from benchmarks.measure import alternate, ratio
from dspark_lightning.loading import load_target
from dspark_lightning.machine import describe_machine
from dspark_lightning.target import HFDSparkTargetModel, build_target_layer_ids

SHAPE = (4, 256)
"""Rows and tokens of the batch."""

FEATURES = 5
"""Layers captured, as by default; small targets have fewer."""

HEADER = ("target", "capture ms", "whole ms", "time/whole")


def main() -> None:
    """Measure one target and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.target", description=__doc__)
    parser.add_argument("--target", default="embedded", help="model folder, hub id or embedded")
    parser.add_argument("--gguf-file", help="GGUF file in that folder")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each, in turn")
    parser.add_argument("--json", help="file to write the numbers to")
    args = parser.parse_args()
    model = load_target(args.target, args.gguf_file)
    num_layers = model.config.get_text_config().num_hidden_layers
    target = HFDSparkTargetModel(model, build_target_layer_ids(num_layers, min(FEATURES, num_layers - 1)))
    ids = torch.randint(0, model.config.get_text_config().vocab_size, SHAPE)
    loss_mask = torch.ones_like(ids)

    def capture() -> None:
        target.generate_batch(ids, None, loss_mask)

    @torch.no_grad()
    def whole() -> None:
        model(input_ids=ids, output_hidden_states=True, use_cache=False)

    seconds = alternate({"capture": capture, "whole": whole}, args.repeats)
    machine = describe_machine(ids.device)
    name = args.gguf_file or args.target
    times = [report.milliseconds(median(seconds[one])) for one in ("capture", "whole")]
    report.print_table(machine, HEADER, [[name, *times, report.spread(ratio(seconds["capture"], seconds["whole"]))]])
    if args.json:
        report.write_json(args.json, machine, [{"target": name, "seconds": seconds}])


if __name__ == "__main__":
    main()
