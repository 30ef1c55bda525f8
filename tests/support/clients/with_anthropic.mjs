// Anthropic's package for Node.
import { createRequire } from "node:module";

const [url, key, model, modules] = process.argv.slice(2);
const { Anthropic } = createRequire(`${modules}/`)("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: "hello" }], max_tokens: 3 };
const whole = await client.messages.create(asked);
const stream = await client.messages.stream(asked).finalText();
let unknown = "";
try {
  await client.messages.create({ ...asked, model: "nobody" });
} catch (error) {
  if (error instanceof Anthropic.NotFoundError) unknown = error.message;
}
const counted = (await client.messages.countTokens({ model, messages: asked.messages })).input_tokens > 0;
console.log(JSON.stringify({ whole: whole.content[0].text, tokens: whole.usage.output_tokens, stream, counted, unknown }));
