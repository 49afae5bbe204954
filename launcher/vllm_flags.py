"""Flags of vLLM that loong does not have: what stands in their place, as on the page for vLLM's users.

`none: WHY` stands for nothing.
"""

SERVE = {
    "-dp": "--num-instances: replicas of the weights, but one server and one queue",
    "--data-parallel-size": "--num-instances: replicas of the weights, but one server and one queue",
    "--num-gpu-blocks-override": "--kv-cache-tokens: in tokens, an instance; there are no blocks",
    "--scheduling-policy": "--policy: what decides all of it, not only the order",
    "--max-num-seqs": "none: what fits into KV runs",
    "--long-prefill-token-threshold": "none: chunks follow from targets",
    "--max-long-partial-prefills": "none: chunks follow from targets",
    "--max-num-partial-prefills": "none: chunks follow from targets",
    "--no-enable-chunked-prefill": "none: prompts are cut where a step would be too long",
    "--enforce-eager": "none: steps are captured where that is the quicker way",
    "--compilation-config": "none: steps are captured where that is the quicker way",
    "--enable-log-requests": "none: no prompt and no answer is logged",
    "--generation-config": "none: a request that says nothing is drawn at temperature 1",
    "--chat-template": "none: the one of the model's folder",
    "--tokenizer": "none: tokenizer.json of the folder",
    "--trust-remote-code": "none: no code of models runs",
    "--ssl-certfile": "none: a proxy's work",
    "--root-path": "none: a proxy's work",
    "--pipeline-parallel-size": "none: instances share a prompt by its positions, not by layers",
    "--distributed-executor-backend": "--hosts ray: instances on the hosts of a Ray cluster",
    "--enable-lora": "none: there are no LoRA adapters",
    "--speculative-config": "none: there is no speculative decoding",
    "--kv-transfer-config": "none: KV stays in this server",
    "--reasoning-parser": "none: answers are not parsed",
}
BENCH = {
    "--dataset-name": "--workload: sharegpt, or 'fixed(INPUT,OUTPUT)' for random prompts of one length",
    "--dataset-path": "--workload trace:FILE",
    "--random-input-len": "--workload 'fixed(INPUT,OUTPUT)'",
    "--random-output-len": "--workload 'fixed(INPUT,OUTPUT)'",
    "--num-prompts": "--num-requests",
    "--host": "--base-url http://HOST:PORT",
    "--port": "--base-url http://HOST:PORT",
    "--endpoint": "none: /v1/completions",
    "--ignore-eos": "none: always",
    "--save-result": "none: every run is written",
    "--result-dir": "--output-dir",
    "--percentile-metrics": "none: all are reported",
    "--metric-percentiles": "none: P50, P90, P95 and P99 are reported",
}
