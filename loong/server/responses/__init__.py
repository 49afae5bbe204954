"""`/v1/responses`: chats as OpenAI's newer API has them, without stored state."""
