"""The API of OpenAI: calls and answers as agents know them, whichever way they travel."""
