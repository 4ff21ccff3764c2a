// OpenAI's Node client: responses and chats, whole, streamed, with tools and parsed.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { BASE, CITY, MODEL, PERSON, RESULT, SUM, WEATHER, refused, run, user } from "./checks.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: "none", maxRetries: 0 });
const GREEDY = { model: MODEL, temperature: 0 };
const TOOL = { type: "function", name: "get_weather", description: "Get the current weather of a city", parameters: CITY, strict: true };
const SCHEMA = { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] };

async function whole() {
  const answer = await client.responses.create({ input: SUM, ...GREEDY });
  assert.equal(answer.status, "completed");
  assert.match(answer.output_text, /42/);
}

async function streamed() {
  const expected = (await client.responses.create({ input: SUM, ...GREEDY })).output_text;
  let text = "";
  const kinds = [];
  for await (const event of await client.responses.create({ input: SUM, stream: true, ...GREEDY })) {
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, expected);
  assert.deepEqual([kinds[0], kinds.at(-1)], ["response.created", "response.completed"]);
}

async function streamHelper() {
  const stream = client.responses.stream({ input: WEATHER, tools: [TOOL], ...GREEDY });
  for await (const event of stream) assert.ok(event.type);
  const [call] = (await stream.finalResponse()).output;
  assert.deepEqual([call.type, call.name, JSON.parse(call.arguments)], ["function_call", "get_weather", { city: "Paris" }]);
}

async function toolsRoundTrip() {
  const first = await client.responses.create({ input: WEATHER, tools: [TOOL], ...GREEDY });
  const result = { type: "function_call_output", call_id: first.output[0].call_id, output: RESULT };
  const whole = await client.responses.create({ input: [...user(WEATHER), ...first.output, result], tools: [TOOL], ...GREEDY });
  assert.match(whole.output_text, /sunny/);
  const kept = await client.responses.create({ input: [result], previous_response_id: first.id, tools: [TOOL], ...GREEDY });
  assert.equal(kept.output_text, whole.output_text);
}

async function parsed() {
  const format = { type: "json_schema", name: "person", schema: SCHEMA, strict: true };
  const answer = await client.responses.parse({ input: PERSON, text: { format }, ...GREEDY });
  assert.deepEqual(JSON.parse(answer.output_text), { name: "Tom", age: 9 });
}

async function chat() {
  const answer = await client.chat.completions.create({ messages: user(SUM), ...GREEDY });
  assert.match(answer.choices[0].message.content, /42/);
  const stream = client.chat.completions.stream({ messages: user(SUM), ...GREEDY });
  assert.equal(await stream.finalContent(), answer.choices[0].message.content);
}

async function chatRunsTools() {
  const asked = [];
  const get_weather = ({ city }) => (asked.push(city), RESULT);
  const description = "Get the current weather of a city";
  const tools = [{ type: "function", function: { name: "get_weather", description, parse: JSON.parse, function: get_weather, parameters: CITY } }];
  const runner = client.chat.completions.runTools({ messages: user(WEATHER), tools, ...GREEDY });
  assert.match(await runner.finalContent(), /sunny/);
  assert.deepEqual(asked, ["Paris"]);
}

async function errors() {
  const e = await refused(() => client.responses.create({ input: "x", background: true, ...GREEDY }));
  assert.deepEqual([e.status, e.param], [400, "background"]);
  assert.ok((await refused(() => client.responses.retrieve("resp_x"))) instanceof OpenAI.NotFoundError);
}

await run("openai", [whole, streamed, streamHelper, toolsRoundTrip, parsed, chat, chatRunsTools, errors]);
