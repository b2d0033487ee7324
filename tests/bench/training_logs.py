"""Public training logs that the detector benchmark reads, each named by repository, commit and path.

The logs are not part of this repository. `load_logs` reads them from git clones in one directory, `DIR/owner/name`.
Tuning logs are those that thresholds in `conf/sentinel` were chosen on. No threshold was chosen on a held-out log.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MIN_ROWS = 100
"""Shorter logs are rejected: most rules need more rows."""


@dataclass(frozen=True, slots=True)
class TrainingLog:
    name: str
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...] = ()
    """Before clipping; empty if the log has none."""


Row = tuple[int, float, float | None]
"""Step, loss, gradient norm."""


@dataclass(frozen=True, slots=True)
class Source:
    repository: str
    commit: str
    parse: Callable[[str], Iterator[Row]]
    paths: dict[str, str]
    """Name of a log -> path in the repository."""


def parse_mlperf(text: str) -> Iterator[Row]:
    """MLPerf result files: one JSON object a step; `step` counts samples in some submissions."""
    stats = [json.loads(line[line.index("{") :]) for line in text.splitlines() if '"reduced_train_loss"' in line]
    steps = [int(row["metadata"]["step"]) for row in stats]
    interval = steps[1] - steps[0]
    yield from (
        (step // interval, row["value"]["reduced_train_loss"], None) for step, row in zip(steps, stats, strict=True)
    )


def parse_megatron(text: str) -> Iterator[Row]:
    """Golden values of Megatron-LM's release tests; the string "nan" marks a step that the run did not reach."""
    values = json.loads(text)["lm loss"]["values"]
    yield from ((int(step), float(loss), None) for step, loss in values.items() if loss != "nan")


LLMC_FILE = re.compile(r"^s:(\d+) trl:(\S+)(?: lr:\S+ norm:(\S+))?$", re.MULTILINE)
LLMC_STDOUT = re.compile(r"^step +(\d+)/\d+ \| loss +(\S+) \(\S+\)\| norm +(\S+) \(", re.MULTILINE)
BUILD_NANOGPT = re.compile(r"^step +(\d+) \| loss: (\S+) \| lr \S+ \| norm: (\S+) \|", re.MULTILINE)
MODDED_NANOGPT = re.compile(r"^step:(\d+)/\d+ train_loss:(\S+)()", re.MULTILINE)


def parse_lines(pattern: re.Pattern[str]) -> Callable[[str], Iterator[Row]]:
    def parse(text: str) -> Iterator[Row]:
        for step, loss, norm in pattern.findall(text):
            yield int(step), float(loss), float(norm) if norm else None

    return parse


MLPERF_51 = ("mlcommons/training_results_v5.1", "441d65f4445cd59687466533fd9f55399136e7a4", parse_mlperf)
MLPERF_50 = ("mlcommons/training_results_v5.0", "0fdc28f013256aea84fa36fdaf1e0fa46094b18c", parse_mlperf)
MEGATRON = ("NVIDIA/Megatron-LM", "d98e8a64ddf34856e74b24714e3bedb2f5a39553", parse_megatron)
SPEEDRUN = ("KellerJordan/modded-nanogpt", "f411b3d346aa52d3504324ca93c230fd84c6c07f")
JORAHN = ("jorahn/llm.c", "618f188675c50c92a21a1a086f5d6d78034508e3", parse_lines(LLMC_FILE))
CARDENAS = ("HectorFCardenas/llm.c", "6cbc4b5812c45828892eb0fc4928750a3dbb1d30", parse_lines(LLMC_STDOUT))
EMANI = ("SiddanthEmani/GPT-2-124M-CUDA", "7f9c49c679a5e07f8bd8ad16129630d3e762dd99", parse_lines(LLMC_FILE))
AGNDM = ("AGNDM/build-nanogpt", "76892e505c26317c5f3ad8961c7d9a07127c0f84", parse_lines(BUILD_NANOGPT))
CASES, RECORDS = "tests/functional_tests/test_cases", "records/track_1_short"

TUNING = (
    Source(
        *MLPERF_51,
        {f"Llama 3.1 8B, 64 H100, run {run}": f"Cisco/results/hpf_n8/llama31_8b/result_{run}.txt" for run in range(10)},
    ),
    Source(
        *MLPERF_50,
        {"Llama 3.1 405B, 256 GPUs, run 2": "NVIDIA/results/tyche_ngpu256_ngc25.04_nemo/llama31_405b/result_2.txt"},
    ),
    Source(
        *MEGATRON,
        {
            "GPT-3 15B, H100": f"{CASES}/gpt/gpt3_15b_8t_release/golden_values_dev_dgx_h100.json",
            "DeepSeek-V3 proxy, H100": (
                f"{CASES}/mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release/golden_values_dev_dgx_h100.json"
            ),
            "BERT, H100": f"{CASES}/bert/bert_release/golden_values_dev_dgx_h100.json",
            "Mixtral 8x7B, A100": (
                f"{CASES}/mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release/golden_values_lts_dgx_a100.json"
            ),
        },
    ),
    Source(*SPEEDRUN, parse_lines(LLMC_FILE), {"GPT-2 124M, llm.c": f"{RECORDS}/2024-10-13_llmc/main.log"}),
    Source(
        *SPEEDRUN,
        parse_lines(MODDED_NANOGPT),
        {
            "GPT-2 124M, Muon": f"{RECORDS}/2024-10-10_Muon/eb5659d0-fb6a-49e5-a311-f1f89412f726.txt",
            "GPT-2 124M, SOAP": f"{RECORDS}/2024-10-09_SOAP/5bdc3988-496c-4232-b4ef-53764cb81c92.txt",
        },
    ),
    Source(*JORAHN, {"GPT-3 125M, two data sets": "log_gpt3_125M_edu_hermes_v5/old.log"}),
    Source(*CARDENAS, {"GPT-2 124M, NaN from step 1": "gpt2_train.11679031.log"}),
)

HELD_OUT = (
    Source(
        *MLPERF_51,
        {
            **{
                f"Llama 3.1 8B, 128 H100, run {run}": f"Cisco/results/hpf_n16/llama31_8b/result_{run}.txt"
                for run in range(10)
            },
            **{
                f"Llama 3.1 405B, 256 B200, run {run}": (
                    f"University-of-Florida/results/hpg.dgxb200x8.n32/llama31_405b/result_{run}.txt"
                )
                for run in range(3)
            },
        },
    ),
    Source(
        *MLPERF_50,
        {
            f"Llama 3.1 405B, 256 GPUs, run {run}": (
                f"NVIDIA/results/tyche_ngpu256_ngc25.04_nemo/llama31_405b/result_{run}.txt"
            )
            for run in range(2)
        },
    ),
    Source(
        *MEGATRON,
        {
            "T5, H100": f"{CASES}/t5/t5_release/golden_values_dev_dgx_h100.json",
            "Mixtral 8x7B, H100": (
                f"{CASES}/mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release/golden_values_dev_dgx_h100.json"
            ),
            "Nemotron 3 Super, GB200": (
                f"{CASES}/nemotron/nemotron3_super_release_g200/golden_values_dev_dgx_gb200.json"
            ),
            "GPT-3 15B, A100": f"{CASES}/gpt/gpt3_15b_8t_release/golden_values_lts_dgx_a100.json",
            **{
                f"GPT-3 fp8 {mesh}, H100": (
                    f"{CASES}/gpt/gpt3_weekly_mcore_{mesh}_current_scaling_native_fp8_{rest}_tp_overlap/"
                    "golden_values_dev_dgx_h100.json"
                )
                for mesh, rest in (("tp4_cp2", "tp_sp_cp"), ("tp2_pp2", "tp_pp_sp"))
            },
        },
    ),
    Source(*JORAHN, {"GPT-3 125M, FineWeb-Edu": "log_gpt3_125M_edu_v5/main.log"}),
    Source(
        *CARDENAS,
        {"GPT-2 124M, whole run": "gpt2_train.11685414.log", "GPT-2 124M, NaN, 901 steps": "gpt2_train.11672255.log"},
    ),
    Source(*EMANI, {"GPT-2 124M": "log124M/main.log"}),
    Source(
        *AGNDM,
        {
            f"build-nanogpt, {name}": f"log_{name}/nanogpt-{job}.out"
            for name, job in {
                "1_epoch": "train-1806877",
                "bigger": "bigger-1818620",
                "group_weight_g2": "group-kv-g2-1818671",
                "half_dataset": "half-dataset-1816383",
                "linear_lr": "linear-lr-1816349",
                "no_warmup": "nowarmup-1816358",
                "shuffled": "shuffled-1816360",
                "smaller": "smaller-1818618",
            }.items()
        },
    ),
    Source(
        *SPEEDRUN,
        parse_lines(LLMC_FILE),
        {"GPT-2 124M, AdamW": f"{RECORDS}/2024-06-06_AdamW/f66d43d7-e449-4029-8adf-e8537bab49ea.log"},
    ),
    Source(
        *SPEEDRUN,
        parse_lines(MODDED_NANOGPT),
        {
            "GPT-2 124M, rotary, RMSNorm": f"{RECORDS}/2024-10-14_ModernArch/dabaaddd-237c-4ec9-939d-6608a9ed5e27.txt",
            **{
                f"1B, scaled-up speedrun, {run[:4]}": f"{RECORDS}/2024-10-20_ScaleUp1B/{run}.txt"
                for run in (
                    "87bd51fd-6203-4c88-b3aa-8a849a6a83ca",
                    "ad8d7ae5-7b2d-4ee9-bc52-f912e9174d7a",
                    "c0078066-c8c9-49c8-868a-ff4d4f32e615",
                )
            },
        },
    ),
)

ADDED = (
    Source(
        *MLPERF_51,
        {
            f"Llama 3.1 8B, 64 H200, run {run}": (
                f"HPE/results/HPE-Cray-XD670-H200-SXM5-141GB_n8_25.09/llama31_8b/result_{run}.txt"
            )
            for run in range(1, 11)
        },
    ),
    Source(
        *MEGATRON,
        {
            "DeepSeek-V3 proxy, GB200": (
                f"{CASES}/mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release/"
                "golden_values_dev_dgx_gb200.json"
            ),
            "Nemotron 3 Super, GB200, second run": (
                f"{CASES}/nemotron/nemotron3_super_release_gb200/golden_values_dev_dgx_gb200.json"
            ),
        },
    ),
)
"""Held-out logs that were first read after the rules for sparse logs and for runs that do not learn were fixed: another
submission of the same model, and mixtures of experts."""


def load_logs(sources: tuple[Source, ...], clones: Path) -> list[TrainingLog]:
    """Every log of the sources; a clone or a commit that is missing raises `CalledProcessError` with git's message."""
    return [read_log(source, name, clones) for source in sources for name in source.paths]


def read_log(source: Source, name: str, clones: Path) -> TrainingLog:
    command = ["git", "-C", str(clones / source.repository), "show", f"{source.commit}:{source.paths[name]}"]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode(errors="replace")
    rows = list(source.parse(text))
    assert len(rows) >= MIN_ROWS, f"{source.repository} {source.paths[name]}: {len(rows)} rows"
    norms = tuple(norm for _, _, norm in rows if norm is not None)
    assert len(norms) in (0, len(rows)), f"{source.repository} {source.paths[name]}: norms on some rows only"
    return TrainingLog(name, tuple(step for step, _, _ in rows), tuple(loss for _, loss, _ in rows), norms)
