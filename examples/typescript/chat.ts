// Streaming chat with the Vercel AI SDK, and what the person did with the answer.
//
// Run `ostinato up`, then `npm install && npm start` here. Needs Node 22.18 or newer.
// OSTINATO_URL and OSTINATO_API_KEY name another server and your key.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";
import { Ostinato } from "ostinato-client";

const url = process.env.OSTINATO_URL ?? "http://127.0.0.1:8321";
const apiKey = process.env.OSTINATO_API_KEY;
const ostinato = createOpenAICompatible({ name: "ostinato", baseURL: `${url}/v1`, apiKey });
const signals = new Ostinato(url, { apiKey });

const result = streamText({
  model: ostinato(process.env.OSTINATO_MODEL ?? "smollm2"),
  prompt: "Write a subject line for a sale of lamps.",
  maxOutputTokens: 60,
  providerOptions: { ostinato: { user: "anna" } }, // your product's name for the person
});
for await (const piece of result.textStream) process.stdout.write(piece);

const { id } = (await result.finalStep).response; // what feedback names
console.log(`\n[${id}]`);
await signals.feedback(id, "accepted", true); // on the server's disk when it resolves
await signals.feedback(id, "undone", true, { correction: "Lamps: 30% off" });
