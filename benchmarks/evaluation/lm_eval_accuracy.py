"""Checks that lm-eval finds the same accuracy through `/v1/completions` as with transformers.

A task of multiple choice is written to a folder: a question a line, its answer among three of others. lm-eval
asks a server on CPU instances for it as `local-completions`, unchanged, and then loads the same folder into
transformers itself (`hf`, in float32). Accuracies must be equal, and so must the log likelihood of every
choice, to --tolerance. --lm-eval names the program, in any environment:

    python -m venv env && env/bin/pip install 'lm_eval[api,hf]==0.4.13'
    python benchmarks/evaluation/lm_eval_accuracy.py FOLDER --lm-eval env/bin/lm_eval

Exits with 1 if they differ.
"""

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parents[1] / "support"))

from result import print_result, script_parser

from loong.runs.spawned_server import ServerConfig, spawn_server
from loong.workloads.report.report import table

START_SECONDS, RUN_SECONDS = 180.0, 1200.0
NUM_CHOICES = 4
TASK = """\
task: facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
FACTS = (
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Egypt?", "Cairo"),
    ("What is the largest ocean on Earth?", "the Pacific Ocean"),
    ("Which planet is known as the Red Planet?", "Mars"),
    ("Which planet is the largest in the solar system?", "Jupiter"),
    ("Which gas do plants take in from the air?", "carbon dioxide"),
    ("Which gas do people need to breathe?", "oxygen"),
    ("At what temperature in degrees Celsius does water boil?", "100"),
    ("How many days are there in a week?", "seven"),
    ("How many legs does a spider have?", "eight"),
    ("Who wrote Romeo and Juliet?", "William Shakespeare"),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci"),
    ("Who developed the theory of relativity?", "Albert Einstein"),
    ("Which metal is liquid at room temperature?", "mercury"),
    ("What is the chemical symbol of gold?", "Au"),
    ("What is the chemical formula of water?", "H2O"),
    ("Which organ pumps blood through the body?", "the heart"),
    ("Which animal is known as man's best friend?", "the dog"),
    ("What do bees make?", "honey"),
    ("Which language is spoken in Brazil?", "Portuguese"),
    ("Which continent is the Sahara in?", "Africa"),
    ("Which instrument has 88 keys?", "the piano"),
    ("What is the opposite of hot?", "cold"),
    ("What is the square root of 81?", "nine"),
    ("What color do you get when you mix blue and yellow?", "green"),
    ("In which season do leaves fall from the trees?", "autumn"),
    ("What is the hardest natural substance?", "diamond"),
    ("What force keeps people on the ground?", "gravity"),
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of one run of lm-eval by name, and log likelihoods by question and choice."""

    metrics: Mapping[str, float]
    likelihoods: tuple[tuple[float, ...], ...]


def write_task(folder: Path) -> None:
    """Write the task and its data where lm-eval looks for them."""
    chance = random.Random(0)
    answers = [answer for _, answer in FACTS]
    lines = []
    for question, answer in FACTS:
        choices = [answer, *chance.sample([other for other in answers if other != answer], NUM_CHOICES - 1)]
        chance.shuffle(choices)
        fields = {"question": question, "choices": choices, "answer": choices.index(answer)}
        lines.append(json.dumps(fields))
    data = folder / "facts.jsonl"
    data.write_text("\n".join(lines) + "\n")
    (folder / "facts.yaml").write_text(TASK.format(data=json.dumps(str(data))))


def evaluate(program: str, folder: Path, model: str, arguments: Sequence[str]) -> Evaluation:
    """Run lm-eval on the task."""
    output = folder / model
    command = [program, "run", "--model", model, "--model_args", ",".join(arguments), "--tasks", "facts"]
    command += ["--include_path", str(folder), "--output_path", str(output), "--log_samples"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    (results,) = output.rglob("results_*.json")
    (samples,) = output.rglob("samples_*.jsonl")
    found = json.loads(results.read_text())["results"]["facts"]
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    likelihoods = tuple(tuple(float(pair[0][0]) for pair in line["resps"]) for line in lines)
    return Evaluation({name: found[f"{name},none"] for name in ("acc", "acc_norm")}, likelihoods)


def main() -> None:
    parser = script_parser("lm_eval_accuracy", __doc__)
    parser.add_argument("model", type=Path, help="folder of a model with its tokenizer")
    parser.add_argument("--lm-eval", default="lm_eval", help="program of lm-eval (%(default)s)")
    parser.add_argument(
        "--num-instances", type=int, default=2, help="number of instances of the server (%(default)s)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="largest difference of a log likelihood (%(default)s)"
    )
    args = parser.parse_args()
    model = args.model.resolve()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder)
        flags = ("--device", "cpu", "--dtype", "float32", "--served-model-name", "model")
        config = ServerConfig(str(model), args.num_instances, 1, flags, START_SECONDS)
        with spawn_server(config, "esp", folder / "server.log") as url:
            where = (
                "model=model",
                f"base_url={url}/v1/completions",
                f"tokenizer={model}",
                "num_concurrent=4",
            )
            served = evaluate(args.lm_eval, folder, "local-completions", where)
        loaded = evaluate(args.lm_eval, folder, "hf", (f"pretrained={model}", "dtype=float32"))
    differences = [
        abs(one - other)
        for ours, theirs in zip(served.likelihoods, loaded.likelihoods, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    ]
    rows = [
        (way, *(f"{found.metrics[metric]:.4f}" for metric in ("acc", "acc_norm")))
        for way, found in (("local-completions", served), ("hf", loaded))
    ]
    print(table(("lm-eval", "acc", "acc_norm"), rows))
    print(f"{len(differences)} log likelihoods differ by {max(differences):.2g} at most")
    numbers = {"served": dict(served.metrics), "hf": dict(loaded.metrics), "difference": max(differences)}
    print_result("lm_eval_accuracy", {"model": model.name, **numbers}, save=args.save)
    if served.metrics != loaded.metrics or max(differences) > args.tolerance:
        sys.exit(1)


if __name__ == "__main__":
    main()
