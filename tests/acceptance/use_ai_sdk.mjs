// Vercel's AI SDK: @ai-sdk/openai's default, which is the Responses API, its chat, and @ai-sdk/anthropic.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { BASE, CITY, MODEL, PERSON, RESULT, SUM, WEATHER, refused, run } from "./checks.mjs";

const openai = createOpenAI({ baseURL: BASE, apiKey: "none" });
const anthropic = createAnthropic({ baseURL: BASE, apiKey: "none" });
const MODELS = { default: openai(MODEL), chat: openai.chat(MODEL), anthropic: anthropic(MODEL) };
const SCHEMA = jsonSchema({ type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"], additionalProperties: false });
const COMMON = { temperature: 0, maxRetries: 0, maxOutputTokens: 150 };

function tools(asked) {
  const execute = async ({ city }) => (asked.push(city), RESULT);
  return { get_weather: tool({ description: "Get the current weather of a city", inputSchema: jsonSchema(CITY), execute }) };
}

function checksOf(kind, model) {
  const checks = {
    async whole() {
      const { text, usage, finishReason } = await generateText({ model, prompt: SUM, system: "You are helpful.", ...COMMON });
      assert.match(text, /42/);
      assert.equal(finishReason, "stop");
      assert.ok(usage.outputTokens > 0 && usage.inputTokens > 0);
    },
    async streamed() {
      const result = streamText({ model, prompt: SUM, onError: ({ error }) => assert.fail(error), ...COMMON });
      const pieces = [];
      for await (const piece of result.textStream) pieces.push(piece);
      assert.match(pieces.join(""), /42/);
      assert.ok(pieces.length > 1 && (await result.usage).outputTokens > 0);
    },
    async toolLoop() {
      const asked = [];
      const { text, steps } = await generateText({ model, prompt: WEATHER, tools: tools(asked), stopWhen: stepCountIs(3), ...COMMON });
      assert.deepEqual([asked, steps.length], [["Paris"], 2]);
      assert.match(text, /sunny/);
    },
    async toolLoopStreamed() {
      const asked = [];
      const result = streamText({ model, prompt: WEATHER, tools: tools(asked), stopWhen: stepCountIs(3), ...COMMON });
      assert.match(await result.text, /sunny/);
      assert.deepEqual(asked, ["Paris"]);
    },
    async typedOutput() {
      const { output } = await generateText({ model, prompt: PERSON, output: Output.object({ schema: SCHEMA }), ...COMMON });
      assert.deepEqual(output, { name: "Tom", age: 9 });
    },
    async conversation() {
      const messages = [{ role: "user", content: "My name is Anna." }];
      const first = await generateText({ model, messages, ...COMMON });
      messages.push(...first.response.messages, { role: "user", content: "What is my name?" });
      assert.match((await generateText({ model, messages, ...COMMON })).text, /Anna/);
    },
    async errors() {
      const e = await refused(() => generateText({ model, prompt: "word ".repeat(8000), ...COMMON }));
      assert.equal(e.statusCode, 400);
      assert.match(e.message, /too long/);
    },
  };
  return Object.entries(checks).map(([name, check]) => Object.defineProperty(check, "name", { value: `${kind} ${name}` }));
}

await run("ai", Object.entries(MODELS).flatMap(([kind, model]) => checksOf(kind, model)));
