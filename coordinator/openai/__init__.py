"""What bodies may say and what answers look like, field by field, in OpenAI's shapes."""
