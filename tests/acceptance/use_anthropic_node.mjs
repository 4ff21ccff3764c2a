// Anthropic's Node client: messages whole, streamed, and with tools in a loop; counted tokens; errors.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { CITY, MODEL, RESULT, SUM, URL_, WEATHER, refused, run, user } from "./checks.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: "none", maxRetries: 0 });
const COMMON = { model: MODEL, max_tokens: 1024, temperature: 0 };
const TOOL = { name: "get_weather", description: "Get the current weather of a city", input_schema: CITY };

async function whole() {
  const answer = await client.messages.create({ messages: user(SUM), ...COMMON });
  assert.match(answer.content[0].text, /42/);
  assert.equal(answer.stop_reason, "end_turn");
  const counted = await client.messages.countTokens({ model: MODEL, messages: user(SUM) });
  assert.equal(counted.input_tokens, answer.usage.input_tokens + answer.usage.cache_read_input_tokens);
}

async function streamed() {
  const expected = await client.messages.create({ messages: user(SUM), ...COMMON });
  const stream = client.messages.stream({ messages: user(SUM), ...COMMON });
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const final = await stream.finalMessage();
  assert.equal(text, expected.content[0].text);
  assert.deepEqual(final.content.map(({ type, text }) => ({ type, text })), [{ type: "text", text }]);
  assert.equal(final.usage.output_tokens, expected.usage.output_tokens);
}

async function agentLoop() {
  const messages = user(WEATHER);
  const calls = [];
  let answer;
  for (let i = 0; i < 3; i++) {
    answer = await client.messages.stream({ messages, tools: [TOOL], ...COMMON }).finalMessage();
    messages.push({ role: "assistant", content: answer.content });
    if (answer.stop_reason !== "tool_use") break;
    const uses = answer.content.filter((block) => block.type === "tool_use");
    calls.push(...uses.map((use) => [use.name, use.input]));
    messages.push({ role: "user", content: uses.map((use) => ({ type: "tool_result", tool_use_id: use.id, content: RESULT })) });
  }
  assert.deepEqual(calls, [["get_weather", { city: "Paris" }]]);
  assert.match(answer.content[0].text, /sunny/);
}

async function errors() {
  const e = await refused(() => client.messages.create({ messages: user(SUM), ...COMMON, top_p: 2 }));
  assert.ok(e instanceof Anthropic.BadRequestError && e.error.error.type === "invalid_request_error");
  const missing = await refused(() => client.messages.create({ messages: user(SUM), ...COMMON, model: "claude" }));
  assert.ok(missing instanceof Anthropic.NotFoundError);
}

await run("@anthropic-ai/sdk", [whole, streamed, agentLoop, errors]);
