"""Completes a few prompts and answers a chat, on one instance in this program."""

from loong import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "A ring of four instances passes",
    "Attention over a set of keys can be computed in pieces, because",
]


def main() -> None:
    """Print each prompt with two continuations, and the answer of a chat."""
    params = SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=32, seed=7)
    with LLM("smollm2-135m", max_model_len=2048) as llm:
        for output in llm.generate(PROMPTS, params):
            print(f"\n{output.prompt!r}, {len(output.prompt_token_ids)} tokens")
            for choice in output.outputs:
                print(f"  {choice.text!r} ({choice.finish_reason})")
        messages = [
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "What is a ring?"},
        ]
        (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64))
        print(f"\n{answer.outputs[0].text}")


if __name__ == "__main__":
    main()
