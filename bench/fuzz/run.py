"""Coverage-guided fuzzing of every parser, with atheris (`pip install atheris`), one process per target.

    python bench/fuzz/run.py --seconds 60 [TARGET ...]

Targets are those of `tests/fuzz_targets.py`. A crash, an unexpected exception, more than 5 s for one input or more than
2 GiB of memory ends a target; its input is kept in bench/fuzz/found/. Prints a table; exit code 1 after a finding.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE.parents[1] / "src")]


def fuzz_here(name: str, arguments: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["headwater", "jinja2", "msgspec"]):
        from fuzz_targets import TARGETS

    for seed in TARGETS[name].seeds[:1]:
        TARGETS[name].run(seed)  # what it imports is loaded now, since loading may take longer than an input may
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name].run)
    atheris.Fuzz()


def fuzz_apart(name: str, seconds: int) -> tuple[str, int, str]:
    """(name, inputs tried, what was found)."""
    from fuzz_targets import TARGETS

    found = HERE / "found"
    found.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(TARGETS[name].seeds):
            (Path(corpus) / str(number)).write_bytes(seed)
        limits = [f"-max_total_time={seconds}", "-rss_limit_mb=2048", "-timeout=5", "-max_len=4096"]
        command = [sys.executable, __file__, "--inside", name, *limits, f"-artifact_prefix={found}/{name}-", corpus]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 120)
    said = done.stdout + done.stderr
    tried = [int(number) for number in re.findall(r"(?:^#|DONE.*?|Done )(\d+)", said, re.MULTILINE)]
    return name, max(tried, default=0), "" if done.returncode == 0 else said[-1500:]


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        fuzz_here(sys.argv[2], sys.argv[3:])
    from fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="all, unless named")
    parser.add_argument("--seconds", type=int, default=30, help="per target")
    args = parser.parse_args()
    failed = 0
    for name in args.targets or TARGETS:
        target, tried, fault = fuzz_apart(name, args.seconds)
        print(f"{target:<20}{tried:>10} inputs  {'FOUND SOMETHING' if fault else 'nothing found'}", flush=True)
        if fault:
            print(fault)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
