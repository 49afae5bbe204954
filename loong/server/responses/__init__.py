"""`/v1/responses`: chats in the form of OpenAI's newer API, without stored state."""
