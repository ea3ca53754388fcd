"""`vllm bench serve` for environments where vLLM's distribution has another name, as its CPU build does."""

import argparse

from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
