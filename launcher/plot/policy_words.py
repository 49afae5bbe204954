"""What each policy is, for those who read of it for the first time."""

from collections.abc import Iterable

POLICY_WORDS = {
    "esp": "groups of instances grow and shrink at every step, by deadline",
    "esp-paper": "elastic groups by LoongServe's equations",
    "static-sp": "one fixed group of all instances",
    "replicas": "every instance works alone",
    "tp": "one instance of all devices",
    "chunked": "one instance of all devices, prompts in chunks beside decodes",
    "chunked-replicas": "every instance works alone, prompts in chunks beside decodes",
    "disaggregated": "half of the instances prefill, half decode, and KV moves between",
    "esp-fcfs": "esp, but first come, first served",
    "esp-no-scale-up": "esp, but prompts keep the group that they began with",
    "esp-no-retention": "esp, but without choosing who keeps KV",
    "esp-no-chunks": "esp, but prompts are whole",
    "esp-no-split": "esp, but decode batches merge and never split",
}


def words_of(policies: Iterable[str]) -> str:
    """One sentence that says what those are that are known; nothing if none is."""
    known = [f"{policy}: {POLICY_WORDS[policy]}" for policy in policies if policy in POLICY_WORDS]
    return f"{'; '.join(known)}." if known else ""
