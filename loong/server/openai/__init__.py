"""OpenAI's endpoints: requests, their choices and answers."""
