// OpenAI's package for Node.
import { createRequire } from "node:module";

const [url, key, model, modules] = process.argv.slice(2);
const { OpenAI } = createRequire(`${modules}/`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const whole = await client.chat.completions.create({ model, messages, max_tokens: 3 });
let stream = "";
for await (const piece of await client.chat.completions.create({ model, messages, max_tokens: 3, stream: true })) {
  stream += piece.choices[0]?.delta?.content ?? "";
}
const models = [];
for await (const each of client.models.list()) models.push(each.id);
let unknown = "";
try {
  await client.chat.completions.create({ model: "nobody", messages });
} catch (error) {
  if (error instanceof OpenAI.NotFoundError) unknown = error.message;
}
const responses = (await client.responses.create({ model, input: "hello", max_output_tokens: 3 })).output_text;
const tokens = whole.usage.completion_tokens;
console.log(JSON.stringify({ models, whole: whole.choices[0].message.content, tokens, stream, responses, unknown }));
