// The official JavaScript clients at work against a gateway. Prints what they read as JSON: node sdks.mjs URL KEY MODULES
// Each flow's name is "client: flow"; what a flow throws is its result.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, key, modules] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${modules}/`));
const load = async (name) => (await import(pathToFileURL(require.resolve(name)).href)).default;
const [OpenAI, Anthropic] = [await load("openai"), await load("@anthropic-ai/sdk")];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });

const schema = { type: "object", properties: { path: { type: "string" } }, required: ["path"] };
const chatTools = [{ type: "function", function: { name: "read", parameters: schema } }];
const responseTools = [{ type: "function", name: "read", parameters: schema, strict: false }];
const messageTools = [{ name: "read", input_schema: schema }];
const say = (content) => [{ role: "user", content }];
const chat = (more) => ({ model: "m", messages: say("look"), ...more });
const message = (more) => ({ model: "m", max_tokens: 200, messages: say("look"), ...more });
const types = (events) => events.map((event) => event.type).filter((type, i, all) => type !== all[i - 1]);

async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

const flows = {
  async "openai: chat"() {
    const { choices, usage } = await openai.chat.completions.create(chat());
    return [choices[0].message.content, choices[0].finish_reason, usage.total_tokens > usage.prompt_tokens];
  },
  async "openai: chat stream"() {
    const events = await all(await openai.chat.completions.create(chat({ stream: true, stream_options: { include_usage: true } })));
    const text = events.map((event) => event.choices[0]?.delta?.content ?? "").join("");
    return [text, events.at(-1).choices.length, events.at(-1).usage.completion_tokens > 0];
  },
  async "openai: chat tool and its result"() {
    const runner = openai.chat.completions.stream(chat({ tools: chatTools }));
    const said = (await runner.finalChatCompletion()).choices[0];
    const [call] = said.message.tool_calls;
    const result = { role: "tool", tool_call_id: call.id, content: "text" };
    const next = await openai.chat.completions.create(chat({ tools: chatTools, messages: [...say("look"), said.message, result] }));
    return [said.finish_reason, call.function.name, JSON.parse(call.function.arguments), next.choices[0].message.content];
  },
  async "openai: chat of two answers with log-probabilities"() {
    const { choices } = await openai.chat.completions.create(chat({ n: 2, logprobs: true, top_logprobs: 2 }));
    return [choices.length, choices[0].logprobs.content[0].top_logprobs.length];
  },
  async "openai: completions"() {
    const { choices } = await openai.completions.create({ model: "m", prompt: "once" });
    return choices[0].text.length > 0;
  },
  async "openai: response"() {
    const { output_text, status, usage } = await openai.responses.create({ model: "m", input: "look" });
    return [output_text, status, usage.total_tokens > 0];
  },
  async "openai: response stream"() {
    const events = await all(await openai.responses.create({ model: "m", input: "look", stream: true }));
    return [types(events), events.at(-1).response.output[0].content[0].text];
  },
  async "openai: response tool, gone on by id"() {
    const stream = openai.responses.stream({ model: "m", input: "look", tools: responseTools });
    const first = await stream.finalResponse();
    const call = first.output.find((item) => item.type === "function_call");
    const input = [{ type: "function_call_output", call_id: call.call_id, output: "text" }];
    const next = await openai.responses.create({ model: "m", input, tools: responseTools, previous_response_id: first.id });
    return [call.name, JSON.parse(call.arguments), next.output_text];
  },
  async "openai: error"() {
    try {
      return await openai.chat.completions.create(chat({ temprature: 1 }));
    } catch (error) {
      return [error.constructor.name, error.status, error.param];
    }
  },
  async "anthropic: message"() {
    const { content, stop_reason, usage } = await anthropic.messages.create(message());
    return [content[0].text, stop_reason, usage.output_tokens > 0];
  },
  async "anthropic: message stream"() {
    const stream = anthropic.messages.stream(message());
    const events = await all(stream);
    return [types(events), (await stream.finalMessage()).content[0].text];
  },
  async "anthropic: tool and its result"() {
    const said = await anthropic.messages.stream(message({ tools: messageTools })).finalMessage();
    const use = said.content.find((block) => block.type === "tool_use");
    const result = { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "text" }] };
    const messages = [...say("look"), { role: "assistant", content: said.content }, result];
    const next = await anthropic.messages.create(message({ tools: messageTools, messages }));
    return [said.stop_reason, use.name, use.input, next.content[0].text];
  },
  async "anthropic: cut by the budget"() {
    return (await anthropic.messages.create(message({ max_tokens: 2 }))).stop_reason;
  },
  async "anthropic: count"() {
    return (await anthropic.messages.countTokens({ model: "m", messages: say("look") })).input_tokens > 0;
  },
  async "anthropic: error"() {
    try {
      return await anthropic.messages.create(message({ temprature: 1 }));
    } catch (error) {
      return [error.constructor.name, error.status, error.error.error.type];
    }
  },
  async "both: left in mid-stream"() {
    const one = await openai.chat.completions.create(chat({ stream: true, messages: say("long") }));
    for await (const _ of one) break;
    const other = anthropic.messages.stream(message({ messages: say("long") }));
    for await (const _ of other) break;
    other.abort();
    return "left";
  },
  async "both: a hundred at once"() {
    const asked = Array.from({ length: 100 }, (_, i) =>
      i % 2 ? openai.chat.completions.create(chat()) : anthropic.messages.stream(message()).finalMessage(),
    );
    return (await Promise.all(asked)).map((answer) => answer.id).filter((id, i, ids) => ids.indexOf(id) === i).length;
  },
};

const told = {};
for (const [name, flow] of Object.entries(flows)) {
  told[name] = await flow().catch((error) => `${error.constructor.name}: ${error.message}`);
}
console.log(JSON.stringify(told));
