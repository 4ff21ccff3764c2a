"""What `minisgl bench --help` and its kinds say: the commands to try."""

from typing import Final

DESCRIPTION: Final = """\
Measure the engine or a server; docs/benchmarks.md says what each figure means.

  minisgl bench offline     the engine alone, in this process
  minisgl bench online      any server with OpenAI's API, or one of our own
  minisgl bench loading     how fast weights reach the device
  minisgl bench frontend    how fast one API process makes events, and how fast the usual ways do
  minisgl bench cpu         the engine on a CPU beside transformers and llama.cpp
"""
LOADING_EXAMPLES: Final = """\
Load a checkpoint in one process and in several, each its shard, and compare with plain reads of the same files by as
many threads. Without MODEL it is the built-in one.

  minisgl bench loading ~/models/Qwen3-8B --tp 1,2,4
  minisgl bench loading --shape qwen3-8b --folder /data/shapes    writes 16 GB of random weights there, and keeps them
"""
CPU_EXAMPLES: Final = """\
Run minisgl and what is installed of transformers and llama.cpp on one random checkpoint, taking turns; medians and
ratios. For all of them: pip install transformers accelerate psutil openai llama-cpp-python gguf.

  minisgl bench cpu                                        a model of 10 M weights, bfloat16, two threads
  minisgl bench cpu --shape qwen3-0.6b --repeat 3 --steps 12 --cases decode,prefill
  minisgl bench cpu --shape qwen3-0.6b --quantization int8 --against minisgl,llama.cpp --cases decode
"""
OFFLINE_EXAMPLES: Final = """\
Measure the engine alone. Without MODEL it is the built-in one.

  minisgl bench offline --num-prompts 8 --input-len 64 --output-len 32       seconds, on any CPU
  minisgl bench offline --workload a,batch64,single,prefill --shape qwen3-8b  random weights, no download
  minisgl bench offline ~/models/Qwen3-0.6B --workload a --repeat 5 --json a.json
  minisgl bench offline --workload batch64 --profile-steps 100    what a step costs on the host
  minisgl bench offline --workload batch64 --timeline trace.json  kernels of a few steps, for chrome://tracing
  minisgl bench offline --workload a,shared --ablate              overlap, graphs and radix cache on and off
"""
ONLINE_EXAMPLES: Final = """\
Load a server as its clients would, and tell what they see. Without --url it starts a server of its own.

  minisgl bench online --streams 4 --num-requests 16 --input-len 32-128 --output-len 32    seconds, on any CPU
  minisgl bench online --shape qwen3-8b --json closed.json         64 streams, 192 requests
  minisgl bench online --url http://host:8000 --pattern poisson --rates 1,2,4,8,16 --plot plots
  minisgl bench online --pattern burst --background 16             stalls of running streams
  minisgl bench online --pattern sharegpt --rates 4
  minisgl bench online --pattern trace --trace qwen_traceA_blksz_16.jsonl --num-requests 1000 --speed 2
  minisgl bench online --client-speed                              how many events a second the client itself takes
"""
