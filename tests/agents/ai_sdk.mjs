// Vercel's AI SDK at work against a gateway. Prints what each flow reads as JSON: node ai_sdk.mjs URL KEY MODULES
// Each flow's name is "provider: flow"; what a flow throws is its result.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, key, modules] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${modules}/`));
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, tool, jsonSchema, isStepCount } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });

const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = tool({ inputSchema: jsonSchema(schema), execute: async () => "clear skies" });
const asked = { maxRetries: 0, maxOutputTokens: 1000, tools: { weather }, stopWhen: isStepCount(5) };
const models = {
  responses: { model: openai("m"), user: "ann" },
  whole: { model: openai("m"), user: "bob", store: false },
  chat: { model: openai.chat("m"), user: "eve" },
};

const told = {};
for (const [name, { model, ...options }] of Object.entries(models)) {
  const call = { ...asked, model, providerOptions: { openai: options } };
  const flows = {
    async loop() {
      const { steps, text } = await generateText({ ...call, prompt: "weather?" });
      return [steps.length, text];
    },
    async "stream and a conversation that goes on"() {
      const messages = [{ role: "user", content: "weather, please?" }];
      const texts = [];
      for (let turn = 0; turn < 3; turn++) {
        const answer = streamText({ ...call, messages, onError() {} });
        texts.push(await answer.text);
        messages.push(...(await answer.responseMessages), { role: "user", content: "and then?" });
      }
      return texts;
    },
  };
  for (const [flow, run] of Object.entries(flows)) {
    told[`${name}: ${flow}`] = await run().catch((error) => `${error.name}: ${error.message}`);
  }
}
console.log(JSON.stringify(told));
