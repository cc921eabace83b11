"""The Muons that pip and git have, under the conformance kit, and the table of what they kept."""
