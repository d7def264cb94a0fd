#!/usr/bin/env python3
"""Build the images, by default all five with docker, and print their names, one per line, for commands that load or
push them:

    python3 docker/build.py                                           # bindery/bookie:0.1.0 and so on
    python3 docker/build.py --builder "podman build" --only toolbox
    kind load docker-image $(python3 docker/build.py --version 0.1.1)

The builder's output goes to stderr. Exit code: that of a failed builder; 2 for wrong usage.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = "docker/Dockerfile"
VERSION_FILE = "libs/core/src/bindery_core/version.py"
TARGETS = ("bookie", "broker", "auditor", "toolbox", "spark")
COMMAND_VARIABLE = "E2E_BUILD"
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def source_version(context: Path) -> str:
    """The version of the sources in `context`."""
    match = re.search(r'^VERSION: Final = "(.*)"$', (context / VERSION_FILE).read_text(), re.MULTILINE)
    assert match is not None, f"{VERSION_FILE} has no VERSION"
    return match.group(1)


def source_revision(context: Path) -> str:
    """The commit in `context`, with `-dirty` if tracked files differ from it; `unknown` outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, cwd=context, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--version", help="version of the programs, and tag of the images (default: that of the sources)"
    )
    parser.add_argument("--tag-suffix", default="", metavar="TEXT", help="added to the tag, not to the version")
    parser.add_argument(
        "--only", action="append", choices=TARGETS, metavar="IMAGE", help=f"one of {', '.join(TARGETS)}; repeatable"
    )
    parser.add_argument("--repository", default="bindery", metavar="NAME", help="prefix of the image's name (bindery)")
    parser.add_argument("--builder", metavar="CMD", help='called as CMD OPTIONS -t TAG CONTEXT ("docker build")')
    parser.add_argument(
        "--build-command",
        metavar="CMD",
        help=f"called as CMD TAG CONTEXT OPTIONS instead (default: ${COMMAND_VARIABLE}, unless --builder is given)",
    )
    parser.add_argument(
        "--context", type=Path, default=ROOT, metavar="DIR", help="folder of the sources (default: this repository)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and build nothing")
    args = parser.parse_args(argv)
    if args.builder and args.build_command:
        parser.error("--builder and --build-command exclude each other; they differ in the order of arguments")
    if not (args.context / DOCKERFILE).is_file():
        parser.error(f"no {DOCKERFILE} in {args.context}; --context names the repository's root")
    args.version = args.version or source_version(args.context)
    if not TAG.fullmatch(args.version + args.tag_suffix):
        parser.error(f"not a tag: {args.version + args.tag_suffix!r}; letters, digits, '.', '_' and '-' make one")
    return args


def commands(args: argparse.Namespace, environment_command: str | None) -> dict[str, list[str]]:
    """Image name -> the command that builds it."""
    made: dict[str, list[str]] = {}
    revision = source_revision(args.context)
    prefix = args.build_command or (None if args.builder else environment_command)
    for target in args.only or TARGETS:
        name = f"{args.repository}/{target}:{args.version}{args.tag_suffix}"
        options = ["--target", target, "-f", DOCKERFILE]
        options += ["--build-arg", f"VERSION={args.version}", "--build-arg", f"REVISION={revision}"]
        made[name] = (
            [*shlex.split(prefix), name, ".", *options]
            if prefix
            else [*shlex.split(args.builder or "docker build"), *options, "-t", name, "."]
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    for name, command in commands(args, os.environ.get(COMMAND_VARIABLE)).items():
        if args.dry_run:
            print(shlex.join(command))
            continue
        if shutil.which(command[0]) is None:
            print(f"build.py: there is no {command[0]}; install it, or name another with --builder", file=sys.stderr)
            return 2
        done = subprocess.run(command, cwd=args.context, stdout=sys.stderr, check=False)
        if done.returncode != 0:
            # Builds fail occasionally; finished layers are kept.
            print(f"build.py: {name} was not built; retrying once", file=sys.stderr)
            done = subprocess.run(command, cwd=args.context, stdout=sys.stderr, check=False)
        if done.returncode != 0:
            print(f"build.py: {name} was not built; the builder's output is above", file=sys.stderr)
            return done.returncode
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
