"""A phrase for each policy, for readers who do not know it."""

from collections.abc import Iterable

from loong.workloads.plots.style import DISAGGREGATED, FIXED_GROUPS

POLICY_WORDS = {
    "esp": "groups of instances grow and shrink at every step, by deadline",
    "esp-paper": "elastic groups by LoongServe's equations",
    "static-sp": "one fixed group of all instances",
    "replicas": "every instance works alone",
    "tp": "one instance of all devices",
    "chunked": "one instance of all devices, prompts in chunks together with decodes",
    "chunked-replicas": "every instance works alone, prompts in chunks together with decodes",
    "lightllm": "one instance of all devices, LightLLM's admission and chunks",
    "infinite": "every instance works alone, and those with room keep KV of the others",
    "infinite-paper": "every instance works alone, and KV moves by Infinite-LLM's Algorithm 1",
    "distkv": "every instance works alone, borrows when it is full, and debts are swapped home",
    "lamina": "every instance works alone, and memory instances keep KV and attend",
    "lamina-by-request": "lamina, but a request's KV is on one memory instance",
    "lamina-rotational": "lamina, but micro-batches of one lease rotate over all instances",
    "vllm-m": "every instance works alone, new requests go where most memory is free",
    "vllm-s": "one instance of all devices, as vLLM on one host",
    "esp-fcfs": "esp, but first come, first served",
    "esp-no-apart": "esp, but decodes have no instances of their own",
    "esp-no-spread": "esp, but decodes are on as few instances as have room",
    "esp-no-masters": "esp, but no context is read by several instances",
    "esp-no-memory": "esp, but memory instances keep no KV",
    "esp-no-guests": "esp, but no late prompt takes pauses of decodes",
    "esp-no-light-apart": "esp, but decodes are apart only where that computes more prompts",
    "esp-no-moves": "esp, but KV stays where it was computed",
    "esp-no-proactive": "esp, but KV moves only once its prompt is computed",
    "esp-no-lone": "esp, but no instance runs short prompts alone",
    "esp-no-copies": "esp, but no cached prefix is copied for requests that wait to read it",
    "esp-no-chunks": "esp, but prompts are whole",
}


def words_of(policies: Iterable[str]) -> str:
    """Return one sentence that describes the known policies among these; empty if none is known."""
    known = [f"{policy}: {words}" for policy in policies if (words := _words_of(policy))]
    return f"{'; '.join(known)}." if known else ""


def _words_of(policy: str) -> str | None:
    if found := FIXED_GROUPS.fullmatch(policy):
        return f"esp's order and chunks on fixed groups of {found[1]}"
    if found := DISAGGREGATED.fullmatch(policy):
        order = "esp's order and chunks" if found[1] else "every instance works alone"
        return f"{order}, {found[2]} only decode, and KV moves there"
    return POLICY_WORDS.get(policy)
