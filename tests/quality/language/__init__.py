"""The check of the words that users read: no retired word of the glossary in a message, a help text or a document."""
